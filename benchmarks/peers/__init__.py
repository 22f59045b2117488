"""The peers, each in the way its own documentation shows. Only the environment of `make bench` has them."""
