"""The gateway: the one port of a cluster for people outside of its network (``python -m stoker.gateway``).

What is for the gcs passes as it is; a driver's other connections, to the scheduler, to nodes and workers, and
from these to the driver, are each joined here with one of the driver's own. So a driver outside runs the code
of one inside, and keeps its own references. The gateway has no secret: the gcs says who a token is for.
"""
