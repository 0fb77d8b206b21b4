"""The state that actors save (``__stoker_save__``): what it is, and when it is stored."""
