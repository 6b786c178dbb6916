"""What ``fctune tune`` chooses and remembers: the machine, the config, and the steps that are done."""
