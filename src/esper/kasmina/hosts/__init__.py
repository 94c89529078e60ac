"""Host networks: what they are made of and where seeds can grow in them."""
