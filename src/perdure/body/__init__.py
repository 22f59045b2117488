"""One body: what is ready in it, its place in the journal, its calls, and how its tasks end. It knows no store."""
