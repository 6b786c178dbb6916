"""The Berkeley Function Calling Leaderboard: its cases, and its verdicts."""
