import signal

pytest_plugins = ["conformance", "profiles", "pytester"]

# Who is started in the background by a shell ignores Ctrl-C, and so do all whom he starts. Tests send it to some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
