"""Doing: asyncio, threads, files and clocks. Performs what `control` decides."""
