"""The learned policy: what it sees, what it may do, and its recurrent network."""
