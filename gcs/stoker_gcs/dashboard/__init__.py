"""The dashboard: the page that the gcs serves at ``/``, its sessions, and what only it asks for."""
