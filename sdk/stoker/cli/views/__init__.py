"""Views of a cluster as it is now, and of a job as it was: on one screen, added up, as a page to send on."""
