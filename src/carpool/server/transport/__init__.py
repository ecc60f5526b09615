"""HTTP/1.1 on sockets, below the application."""
