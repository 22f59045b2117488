"""Runs driven in this process: started, joined, claimed and given back."""
