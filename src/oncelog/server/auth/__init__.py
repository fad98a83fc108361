"""Authentication and authorization: credentials, principals and grants."""
