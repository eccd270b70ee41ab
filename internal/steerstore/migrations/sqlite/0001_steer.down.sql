drop table {{lane_commands}};
drop table {{pauses}};
