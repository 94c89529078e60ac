"""Actors in other processes and on other machines, on ray."""
