"""Seeds in a module of the user's own: plain torch modules that hang behind named submodules."""
