//! What the driver holds for the processes named, by card: `audit PID...`, as root.

use std::process::ExitCode;

use gpuslice_scheduler::{Backend, Stock};

fn main() -> ExitCode {
    let pids: Vec<u32> = std::env::args().skip(1).filter_map(|pid| pid.parse().ok()).collect();
    let mut stock = match Stock::kernel() {
        Ok(stock) => stock,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    println!("driver {}", stock.driver());
    for card in stock.cards() {
        println!(
            "nvidia{} {} {} bytes: {:?}",
            card.minor,
            card.uuid,
            card.memory,
            stock.audit(card.minor, &pids)
        );
    }
    ExitCode::SUCCESS
}
