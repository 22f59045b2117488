"""What the engine and the stores share of asyncio: a reply that survives cancellation, an event loop in a thread, named locks."""
