"""What is built on asyncio and threads alone: pending replies, pools of threads, loops in threads, locks, the order of tasks."""
