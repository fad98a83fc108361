"""Tools for the tests of Oncelog and of the applications that use it."""
