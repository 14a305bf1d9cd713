"""The engine: who runs (``scheduler``, ``kv_manager``), the loop (``core``, ``worker``), and the user's ``engine``."""
