"""Ray's names, keywords and shapes as Stoker's: tables, and the functions that read them."""
