"""HTTP below the APIs: connections, bodies, events and answers."""
