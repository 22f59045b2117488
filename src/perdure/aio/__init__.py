"""What is built on asyncio alone: a reply that survives cancellation, a loop in a thread, named locks, the order of tasks."""
