"""Growing a module of the user's own: the controller, the one call, its result, the check."""
