"""Failures that others met, by number: each test is named by what is right here."""
