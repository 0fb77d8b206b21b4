"""The history of task attempts: reports merge in any order, and nothing acknowledged is lost."""
