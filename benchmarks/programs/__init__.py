"""perdure, and the floors: what it stands on without it. They need nothing but what the development environment has."""
