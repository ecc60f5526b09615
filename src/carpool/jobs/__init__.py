"""Jobs that outlive the process: `store` keeps them and their files, `database` is its SQLite."""
