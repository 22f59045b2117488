"""What is built on asyncio alone: a reply that survives cancellation, threads, a loop in a thread, named locks, the order of tasks."""
