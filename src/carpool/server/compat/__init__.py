"""The APIs of other servers, as far as their clients need them, over this one's own."""
