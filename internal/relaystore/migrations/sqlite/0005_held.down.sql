drop index {{parked_held}};
