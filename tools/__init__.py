"""What developers run; in no wheel."""
