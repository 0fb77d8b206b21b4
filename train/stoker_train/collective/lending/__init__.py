"""Tensors that stay with the member that put them, and go to readers of its group without host memory.

``stoker.put(value, tensor_transport="collective")`` calls :func:`.loans.lending_of`; what it returns keeps
a copy of each tensor on its device. A reader, who must be a member too, asks for it by a key of the group
in the control store; the lender's watch over that queues the sending, so it answers while its actor is
busy. Both have a lane of their own for each direction, whose operations keep their order, and whose
deadlines are the group's: a lender that has died is the error that it is for collectives.
"""
