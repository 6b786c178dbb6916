"""Tasks in environments of the verifiers package, which runs in a process of its own."""
