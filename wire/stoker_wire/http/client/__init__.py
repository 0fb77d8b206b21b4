"""The client half: calls, streams and watches with deadlines and retries; pools; who leads."""
