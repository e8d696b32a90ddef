"""The tests of hpctrain. support/ holds what they share."""
