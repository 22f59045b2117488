"""Steps that run in an executor of the user's: in other threads, in other processes or on other machines."""
