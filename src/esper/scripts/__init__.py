"""Scripts are the command line: thin commands over the other packages."""
