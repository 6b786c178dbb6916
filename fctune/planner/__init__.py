"""What a run will need, before it is launched: memory, time, money, room on disk."""
