"""Many answers to each question, judged: rewards, pass rates, rows to train on and preference pairs."""
