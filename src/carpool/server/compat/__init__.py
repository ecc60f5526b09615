"""APIs of other servers, mapped to this server's own, for their clients."""
