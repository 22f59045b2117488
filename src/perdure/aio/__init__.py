"""What the engine and the stores share of asyncio: a reply that survives cancellation, and an event loop in a thread."""
