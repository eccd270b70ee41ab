package outboxstore

// Lanes is the number of lanes. It is part of the stored format.
const Lanes = 32
