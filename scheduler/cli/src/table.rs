//! Columns of text.

/// Lines whose columns are as wide as their widest cell; two spaces between.
pub(crate) fn lines(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// A size with one digit behind the point.
pub(crate) fn size(bytes: u64) -> String {
    let scaled = |shift: u32, unit: &str| {
        let tenths = (u128::from(bytes) * 10) >> shift;
        format!("{}.{} {unit}", tenths / 10, tenths % 10)
    };
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => scaled(10, "KiB"),
        1_048_576..1_073_741_824 => scaled(20, "MiB"),
        _ => scaled(30, "GiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["A".into(), "BCD".into()], vec!["long".into(), "x".into(), "y".into()]];
        assert_eq!(lines(&rows), "A     BCD\nlong  x    y\n");
    }

    #[test]
    fn sizes_have_one_digit_behind_the_point() {
        for (bytes, text) in [
            (0, "0 B"),
            (1536, "1.5 KiB"),
            (9 << 20, "9.0 MiB"),
            (4 << 30, "4.0 GiB"),
            (u64::MAX, "17179869183.9 GiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }
}
