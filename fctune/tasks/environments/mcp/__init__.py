"""Tasks whose tools are those of an MCP server."""
