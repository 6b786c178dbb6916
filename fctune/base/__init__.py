"""What every room rests on: errors, files, processes, the network, the terminal, and readers that evaluate nothing."""
