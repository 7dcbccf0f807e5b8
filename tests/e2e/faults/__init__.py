"""Fault injection on a real service: what is done to it, what must hold of it afterwards, and the rounds."""
