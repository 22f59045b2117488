"""What is built on asyncio alone: a reply that survives cancellation, an event loop in a thread, named locks, the order of tasks."""
