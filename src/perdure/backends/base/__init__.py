"""What stores on a server share: the loop their connections live on, another attempt after errors that pass, and group commit."""
