"""The algorithms: each module registers one, with its settings and how its runs are made."""
