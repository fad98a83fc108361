pytest_plugins = ["conformance", "profiles", "pytester"]
