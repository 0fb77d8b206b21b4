"""The pages of the error codes: ``page`` renders them, the other modules have their texts."""
