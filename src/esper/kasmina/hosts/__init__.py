"""Host networks: their layers, and the slots in which seeds can grow."""
