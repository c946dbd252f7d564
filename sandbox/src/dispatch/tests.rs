//! Dispatch as a whole, against a driver in small.

mod checks;
mod lives;
mod model;
mod pointers;
mod quota;
mod views;
